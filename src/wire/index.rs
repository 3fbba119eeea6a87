//! placeholder (helper store)
