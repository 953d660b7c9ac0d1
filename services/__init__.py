"""The shared ground of Streetcar, and the edges of its mesh."""
