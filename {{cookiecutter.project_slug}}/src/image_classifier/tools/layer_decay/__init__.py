"""`--optim.layer-decay`: lower blocks of a network learn more slowly."""
