"""Warnings on likely mistakes before the first step."""
