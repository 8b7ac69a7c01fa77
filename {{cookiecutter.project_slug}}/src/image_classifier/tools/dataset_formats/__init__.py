"""What datasets in other formats share: labels that are names or numbers, and their parts."""
