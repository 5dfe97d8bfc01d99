"""How results look: one plotly theme and the export of figures; nothing here computes a number or imports torch."""
