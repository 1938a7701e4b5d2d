"""The command-line tools. Import as ``fxamp.tools``; they look at what the library did and never change it."""
