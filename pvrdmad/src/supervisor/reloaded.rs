//! Result of reloading the configuration.

use std::fmt;

/// Result of reloading the configuration.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Devices that were added.
    pub added: Vec<String>,
    /// Devices that were removed.
    pub removed: Vec<String>,
    /// Removals that did not finish in time.
    pub problems: Vec<String>,
}

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.added.is_empty() && self.removed.is_empty() {
            f.write_str("nothing has changed")?;
        }
        let lists = [("added", &self.added), ("removed", &self.removed), ("problems", &self.problems)];
        let told = lists.into_iter().filter(|(_, names)| !names.is_empty());
        for (index, (what, names)) in told.enumerate() {
            let comma = if index > 0 { "; " } else { "" };
            write!(f, "{comma}{what}: {}", names.join(", "))?;
        }
        Ok(())
    }
}
