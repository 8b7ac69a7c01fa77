"""The command `prepare`: shrinks large photographs once, so that epochs load faster."""
