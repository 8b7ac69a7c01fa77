"""Tables of labels as other programs have them: columns by other names, doubtful classes."""
