"""Engines that answer requests here: by training in this process, or by shapes alone."""
