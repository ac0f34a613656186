"""Write pages that open offline: their frame, figures, curves and numbers."""
