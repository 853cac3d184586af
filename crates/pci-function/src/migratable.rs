//! Saving the state of a function, and restoring it in another one.

use std::io::{Read, Write};

use crate::{PciFunction, StateError};

/// A function whose state can be saved and restored: for snapshots, live migration, and replacing the process that runs
/// the function.
///
/// | step | source | destination |
/// | --- | --- | --- |
/// | 1 | [`pause`](Self::pause) | |
/// | 2 | [`save`](Self::save) | [`restore`](Self::restore) into a function of the same configuration |
/// | 3 | [`leave`](Self::leave), drop the function | map the guest's memory, connect the interrupts |
/// | 4 | | [`resume`](Self::resume) |
///
/// If a step at the destination fails, the source can [`resume`](Self::resume) instead of being dropped, and nothing
/// has changed for the guest.
///
/// A paused function starts nothing by itself. The VMM makes no register access to it from the beginning of `pause` to
/// the end of `resume`, except to configuration space and [`PciFunction::reset`], and forwards the accesses of a guest
/// afterwards. Doorbells need not be forwarded, because `resume` looks at all queues.
///
/// The VMM saves the MSI-X table and the pending bits, because it implements them.
pub trait Migratable: PciFunction {
    /// Pauses the function. When this returns, no thread accesses the guest's memory for it or raises an interrupt, and
    /// its state does not change, until [`Self::resume`] or [`PciFunction::reset`] is called. Waits a bounded time for
    /// work in progress. Does nothing if the function is paused already.
    fn pause(&self);

    /// Writes the state of the paused function. It remains paused, whether or not this succeeds.
    ///
    /// # Errors
    /// The function is not paused, holds something that cannot be saved, or `to` fails.
    fn save(&self, to: &mut dyn Write) -> Result<(), StateError>;

    /// Resets the function, and reads a state that [`Self::save`] has written. The function is paused afterwards. Reads
    /// no byte after the end of the state, and no guest memory, which need not be mapped yet.
    ///
    /// Connections to other hosts continue only if the state is that of a live migration, which was saved within the
    /// last minute. Those of a snapshot end, because their other ends have continued since.
    ///
    /// The state is untrusted: whatever it holds, the function can do no more than a guest could have it do.
    ///
    /// # Errors
    /// The state is damaged, is not one of such a function, or asks for more than the configuration allows, or `from`
    /// fails. The function is then as [`PciFunction::reset`] leaves it, and not paused.
    fn restore(&self, from: &mut dyn Read) -> Result<(), StateError>;

    /// Does the same as [`Self::restore`], for a function that moves together with all functions of its network, such
    /// as to another process of its host: everything between them continues as it was.
    ///
    /// # Errors
    /// As for [`Self::restore`].
    fn restore_with_network(&self, from: &mut dyn Read) -> Result<(), StateError> {
        self.restore(from)
    }

    /// Tells the paused function that another one continues with its state. Those with which it was connected inside
    /// the process look for it elsewhere from now on. It is reset next.
    fn leave(&self) {}

    /// Describes the objects of the function that cannot move to another host, one line for each. May be called at any
    /// time.
    fn blockers(&self) -> Vec<String> {
        Vec::new()
    }

    /// Ends the pause: the function continues with everything that was left in its queues, and interrupts the guest for
    /// everything that the guest may not have been told of. Does nothing if the function is not paused.
    ///
    /// # Errors
    /// A restored state refers to memory that the guest does not have. The function is then as [`PciFunction::reset`]
    /// leaves it, and not paused.
    fn resume(&self) -> Result<(), StateError>;
}
