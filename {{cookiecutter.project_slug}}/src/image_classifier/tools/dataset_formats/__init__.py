"""What datasets that are no folders of files share: labels as numbers, parts, and channels."""
