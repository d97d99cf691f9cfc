"""H2: HeteroAuto's search for the stages of unlike chips (2025)."""
