"""Cleaning what a store holds: copies, outliers, leaks, wrong labels; and what to label next."""

from ssl_kd.curate.duplicates import RULES, Duplicates, near_duplicates

__all__ = ["RULES", "Duplicates", "near_duplicates"]
