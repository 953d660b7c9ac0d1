"""Virtual time: the real cores and the real codec in one thread, from one seed."""
