"""What builds the site: excerpts, figures, tables, the trace viewer."""
