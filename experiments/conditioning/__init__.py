"""Studies of conditioning: small text-to-image trainings on rendered shapes."""
