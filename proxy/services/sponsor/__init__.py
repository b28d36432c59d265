"""Gas sponsorship. `policies` manages the rules that owners set, `costs` reads prices, `paymasters` holds the signers,
`sponsorship` decides and reserves, `refusals` records refused operations, and `settlement` closes reservations by what landed
on the chain."""
