"""HAP: programs synthesised for unlike devices, with the best ratios (EuroSys '24)."""
