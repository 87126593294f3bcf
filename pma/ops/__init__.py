"""torch operators of namespace `pma`, the choice of implementation, and the differentiable boundary."""
