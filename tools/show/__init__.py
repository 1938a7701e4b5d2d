"""fxamp-show: read what mixed precision does to a graph, with the reason for every cast."""
