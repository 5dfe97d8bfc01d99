"""How results look: one plotly theme and the export of figures; no number is computed here."""
