"""report.html: the run directory as one self-contained page."""
