"""`--data.on-bad-image skip`: training passes over unreadable images."""
