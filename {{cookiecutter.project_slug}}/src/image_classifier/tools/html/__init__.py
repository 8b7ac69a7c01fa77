"""Pieces of HTML pages."""
