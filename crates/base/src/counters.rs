//! Counters of devices, adapters and links. Each has its name, kind, unit and meaning, so that an exporter needs
//! neither a lookup table nor a mapping of names.
//!
//! A counter `wire_sent_bytes` becomes the metric `pvrdma_wire_sent_bytes_total`, a gauge `vxlan_stations` becomes
//! `pvrdma_vxlan_stations`. The [`counters!`](crate::counters!) macro refuses to compile names that do not fit.

use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(feature = "serde")]
use serde::{Deserialize, Serialize, Serializer};

/// Kind of a metric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize), serde(rename_all = "lowercase"))]
pub enum Kind {
    /// Counter: never decreases.
    Counter,
    /// Gauge: goes up and down.
    Gauge,
}

/// Unit of a metric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Unit {
    /// A number of things, without a unit.
    None,
    /// Bytes.
    Bytes,
}

/// Value of a metric at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counter {
    /// Name, in lower case with underscores. It is unique in the process and ends with the unit.
    pub name: &'static str,
    /// Kind: counter or gauge.
    pub kind: Kind,
    /// Unit.
    pub unit: Unit,
    /// Meaning, as a sentence.
    pub help: &'static str,
    /// Value.
    pub value: u64,
}

impl Counter {
    /// Creates a counter, whose value never decreases.
    pub const fn total(name: &'static str, unit: Unit, help: &'static str, value: u64) -> Self {
        Self { name, kind: Kind::Counter, unit, help, value }
    }

    /// Creates a gauge, whose value goes up and down.
    pub const fn gauge(name: &'static str, unit: Unit, help: &'static str, value: u64) -> Self {
        Self { name, kind: Kind::Gauge, unit, help, value }
    }

    /// Serializes values as a map with their names as keys.
    ///
    /// # Errors
    /// Errors of the serializer.
    #[cfg(feature = "serde")]
    pub fn by_name<S: Serializer>(counters: &[Self], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(counters.iter().map(|counter| (counter.name, counter.value)))
    }

    /// Returns `true` if an exporter can use the metric unchanged: the name holds only `a` to `z`, digits and
    /// underscores, starts with a letter, names the unit and has no suffix that exporters add (`_total`), and the help
    /// is a sentence.
    pub const fn is_exportable(&self) -> bool {
        let (name, help) = (self.name.as_bytes(), self.help.as_bytes());
        let mut rest = name;
        while let [byte, tail @ ..] = rest {
            if !matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_') {
                return false;
            }
            rest = tail;
        }
        let unit_is_named = match self.unit {
            Unit::Bytes => matches!(name, [.., b'_', b'b', b'y', b't', b'e', b's']),
            Unit::None => !matches!(name, [.., b'b', b'y', b't', b'e', b's']),
        };
        let starts_with_letter = matches!(name, [b'a'..=b'z', ..]);
        let ends_plainly = !matches!(name, [.., b'_'] | [.., b'_', b't', b'o', b't', b'a', b'l']);
        unit_is_named && starts_with_letter && ends_plainly && matches!(help, [b'A'..=b'Z', .., b'.'])
    }
}

/// Atomic counter that any thread may increment.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds one.
    #[inline]
    pub fn increment(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds `count`.
    #[inline]
    pub fn add(&self, count: u64) {
        if count != 0 {
            self.0.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Replaces the value by that of a saved state.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Returns the current value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Declares a struct of counters. The documentation of a field is its help text; `in Bytes` gives its [`Unit`].
///
/// ```
/// pvrdma_base::counters! {
///     /// Counts of a link.
///     pub struct LinkCounters {
///         /// Frames that were sent.
///         frames_sent,
///         /// Bytes in them.
///         sent_bytes in Bytes,
///     }
///
///     /// Counts of one batch.
///     pub struct LinkTally;
/// }
///
/// let counters = LinkCounters::default();
/// counters.frames_sent.increment();
/// counters.fold(&mut LinkTally { sent_bytes: 64, ..LinkTally::default() });
/// let values: Vec<_> = counters.list().iter().map(|counter| (counter.name, counter.value)).collect();
/// assert_eq!(values, [("frames_sent", 1), ("sent_bytes", 64)]);
/// ```
///
/// The fields are [`Count`]s. The second struct, which is optional, is for hot paths: it has the same fields as plain
/// numbers, and `fold` adds them to the shared counters once per batch.
///
/// A name or a help text that an exporter cannot use is a compile error:
///
/// ```compile_fail
/// pvrdma_base::counters! {
///     /// Counts of a link.
///     struct LinkCounters {
///         /// Bytes that were sent.
///         sent,
///         /// Bytes that came, but the name does not say so.
///         received in Bytes,
///     }
/// }
/// ```
#[macro_export]
macro_rules! counters {
    (@unit) => { $crate::Unit::None };
    (@unit $unit:ident) => { $crate::Unit::$unit };
    (
        $(#[$attribute:meta])* $visibility:vis struct $counters:ident {
            $($(#[doc = $help:literal])+ $name:ident $(in $unit:ident)?,)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Default)]
        $visibility struct $counters {
            $($(#[doc = $help])+ $visibility $name: $crate::Count,)*
        }

        impl $counters {
            /// Returns all counters in the order of their declaration.
            $visibility fn list(&self) -> Vec<$crate::Counter> {
                vec![$($crate::Counter::total(
                    stringify!($name),
                    $crate::counters!(@unit $($unit)?),
                    concat!($($help),+).trim_ascii(),
                    self.$name.get(),
                ),)*]
            }
        }

        $(const _: () = assert!(
            $crate::Counter::total(
                stringify!($name),
                $crate::counters!(@unit $($unit)?),
                concat!($($help),+).trim_ascii(),
                0,
            ).is_exportable(),
            concat!("an exporter cannot take the name or the help of ", stringify!($name))
        );)*
    };
    (
        $(#[$attribute:meta])* $visibility:vis struct $counters:ident {
            $($(#[doc = $help:literal])+ $name:ident $(in $unit:ident)?,)*
        }

        $(#[$tally_attribute:meta])* $tally_visibility:vis struct $tally:ident;
    ) => {
        $crate::counters! {
            $(#[$attribute])* $visibility struct $counters {
                $($(#[doc = $help])+ $name $(in $unit)?,)*
            }
        }

        $(#[$tally_attribute])*
        #[derive(Debug, Default)]
        $tally_visibility struct $tally {
            $($(#[doc = $help])+ $tally_visibility $name: u64,)*
        }

        impl $counters {
            /// Adds a batch to the counters and resets it to zero.
            $visibility fn fold(&self, tally: &mut $tally) {
                $(self.$name.add(tally.$name);)*
                *tally = $tally::default();
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    counters! {
        /// Counts.
        struct Some {
            /// Things that
            /// happened.
            things,
            /// Bytes in them.
            thing_bytes in Bytes,
        }

        /// A batch.
        struct Batch;
    }

    #[test]
    fn a_batch_is_added_and_the_list_describes_each_count() {
        let some = Some::default();
        some.things.increment();
        let mut batch = Batch { things: 2, thing_bytes: 100 };
        some.fold(&mut batch);
        assert_eq!((batch.things, batch.thing_bytes), (0, 0));
        assert_eq!(
            some.list(),
            [
                Counter::total("things", Unit::None, "Things that happened.", 3),
                Counter::total("thing_bytes", Unit::Bytes, "Bytes in them.", 100),
            ]
        );
    }

    #[test]
    fn an_exporter_takes_only_names_and_sentences() {
        let fits = |name, unit, help| Counter::gauge(name, unit, help, 0).is_exportable();
        assert!(fits("frames_sent", Unit::None, "Frames that were sent."));
        assert!(fits("sent_bytes", Unit::Bytes, "Bytes that were sent."));
        for name in ["", "frames sent", "Frames", "2frames", "frames_", "frames_total", "frames-sent", "sent_bytes"] {
            assert!(!fits(name, Unit::None, "Frames that were sent."), "{name}");
        }
        assert!(!fits("bytes_sent", Unit::Bytes, "Bytes that were sent."));
        for help in ["", ".", "Frames", "frames that were sent.", " Frames."] {
            assert!(!fits("frames_sent", Unit::None, help), "{help}");
        }
    }
}
