"""What a person types: one module per command; options in, exit status and rendered tables out."""
