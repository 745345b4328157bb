"""What all stages use and what uses none of them: files, progress, tables, pages."""
