//! Errors of saving and restoring a function.

use std::error::Error;

/// Reason a state was not saved or not restored. The types behind it are those of the function.
pub type StateError = Box<dyn Error + Send + Sync>;
