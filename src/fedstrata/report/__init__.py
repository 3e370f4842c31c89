"""What a run gave and what it cost: tables for the terminal, plots, and one offline HTML page."""
