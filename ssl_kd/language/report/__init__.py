"""Write the report of a language run, and format its scores."""
