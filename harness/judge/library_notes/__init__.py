"""What libraries and transports do differently from the textbook and from defaults, as records show."""
