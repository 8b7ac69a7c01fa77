"""What datasets that are no folders of files share: labels as numbers, and their parts."""
