"""What to do about an unreadable image."""

CURE = "let `check` find all such images"
