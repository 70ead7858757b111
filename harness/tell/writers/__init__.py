"""Writers: the same document as markdown, HTML, CSV, JSON or LaTeX."""
