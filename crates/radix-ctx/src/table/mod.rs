//! Contexts by ids that the table hands out.
