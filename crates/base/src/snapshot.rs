//! Descriptions of objects, taken without waiting for a lock.

use std::time::Duration;

#[cfg(feature = "serde")]
use serde::{Serialize, Serializer};

/// Description of the data behind a lock, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Snapshot<T> {
    /// The description.
    Taken(T),
    /// The lock was held, so there is no description. Serialized as the string `"busy"`.
    Busy,
}

impl<T> Snapshot<T> {
    /// Returns the description, if there is one.
    pub fn taken(self) -> Option<T> {
        match self {
            Self::Taken(value) => Some(value),
            Self::Busy => None,
        }
    }
}

/// Converts the result of an attempt to lock.
impl<T> From<Option<T>> for Snapshot<T> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Busy, Self::Taken)
    }
}

#[cfg(feature = "serde")]
impl<T: Serialize> Serialize for Snapshot<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Taken(value) => value.serialize(serializer),
            Self::Busy => serializer.serialize_str("busy"),
        }
    }
}

/// Returns a duration in whole microseconds, the unit of times in descriptions.
pub fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_description_or_a_word() {
        let shown = |snapshot| serde_json::to_value::<Snapshot<[u8; 2]>>(snapshot).unwrap();
        assert_eq!((shown(Snapshot::from(None)), shown(Snapshot::from(Some([1, 2])))), (json!("busy"), json!([1, 2])));
        assert_eq!((micros(Duration::from_nanos(1999)), micros(Duration::MAX)), (1, u64::MAX));
    }
}
