"""Decode image files of any common format to pixels that are displayed upright."""
