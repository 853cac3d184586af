//! States of a device in a migration, and the arcs between them.
//!
//! The states and their numbers are those of `enum vfio_device_mig_state` of Linux' `vfio.h`, without the optional ones
//! (P2P, PRE_COPY):
//!
//! ```text
//!   RUNNING ── STOP ── STOP_COPY        ERROR
//!                └──── RESUMING
//! ```
//!
//! A client may ask for any state. The device takes the shortest path there, one arc at a time. Nothing but a reset
//! leads out of ERROR, and no request leads into it.

/// State of a device in a migration.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum MigrationState {
    /// A state was refused. Only a reset ends this.
    Error,
    /// The device is paused.
    Stop,
    /// The device serves its guest.
    #[default]
    Running,
    /// The device is paused, and the client reads its state.
    StopCopy,
    /// The client writes the state of another device.
    Resuming,
}

/// Action of the device on an arc between two states.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arc {
    /// RUNNING → STOP: pauses.
    Pause,
    /// STOP → RUNNING: resumes.
    Resume,
    /// STOP → STOP_COPY: saves its state.
    Save,
    /// STOP_COPY → STOP: forgets the state that the client has not read.
    EndSave,
    /// STOP → RESUMING: expects a state.
    Expect,
    /// RESUMING → STOP: restores the state that the client has written.
    Restore,
}

impl MigrationState {
    /// All states, in the order of their numbers.
    #[cfg(test)]
    const ALL: [Self; 5] = [Self::Error, Self::Stop, Self::Running, Self::StopCopy, Self::Resuming];

    /// Returns the number of the state in messages.
    pub const fn number(self) -> u32 {
        match self {
            Self::Error => 0,
            Self::Stop => 1,
            Self::Running => 2,
            Self::StopCopy => 3,
            Self::Resuming => 4,
        }
    }

    /// Returns the state with this number, if it is supported.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Error),
            1 => Some(Self::Stop),
            2 => Some(Self::Running),
            3 => Some(Self::StopCopy),
            4 => Some(Self::Resuming),
            _ => None,
        }
    }

    /// Returns the first arc of the path to another state, with the state at its end. The states must differ, and there
    /// is no path from or to ERROR.
    pub(crate) const fn towards(self, target: Self) -> Option<(Arc, Self)> {
        match (self, target) {
            (Self::Error, _) | (_, Self::Error) => None,
            (Self::Running, Self::Running)
            | (Self::Stop, Self::Stop)
            | (Self::StopCopy, Self::StopCopy)
            | (Self::Resuming, Self::Resuming) => None,
            (Self::Stop, Self::Running) => Some((Arc::Resume, Self::Running)),
            (Self::Stop, Self::StopCopy) => Some((Arc::Save, Self::StopCopy)),
            (Self::Stop, Self::Resuming) => Some((Arc::Expect, Self::Resuming)),
            (Self::Running, _) => Some((Arc::Pause, Self::Stop)),
            (Self::StopCopy, _) => Some((Arc::EndSave, Self::Stop)),
            (Self::Resuming, _) => Some((Arc::Restore, Self::Stop)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::MigrationState as State;
    use super::*;

    /// Returns the arcs of the path, and whether it ends at the target.
    fn way(from: State, target: State) -> (Vec<Arc>, bool) {
        let (mut state, mut arcs) = (from, Vec::new());
        while let Some((arc, next)) = state.towards(target) {
            arcs.push(arc);
            state = next;
            assert!(arcs.len() <= 3, "{from:?} to {target:?} has no end");
        }
        (arcs, state == target && target != State::Error)
    }

    /// Every state and every target.
    #[test]
    fn all_ways() {
        use Arc::{EndSave, Expect, Pause, Restore, Resume, Save};
        let (none, at_target) = (&[][..], true);
        let table: [[(&[Arc], bool); 5]; 5] = [
            // To ERROR, STOP, RUNNING, STOP_COPY, RESUMING. From ERROR:
            [(none, false); 5],
            // From STOP:
            [(none, false), (none, at_target), (&[Resume], true), (&[Save], true), (&[Expect], true)],
            // From RUNNING:
            [(none, false), (&[Pause], true), (none, at_target), (&[Pause, Save], true), (&[Pause, Expect], true)],
            // From STOP_COPY:
            [
                (none, false),
                (&[EndSave], true),
                (&[EndSave, Resume], true),
                (none, at_target),
                (&[EndSave, Expect], true),
            ],
            // From RESUMING:
            [
                (none, false),
                (&[Restore], true),
                (&[Restore, Resume], true),
                (&[Restore, Save], true),
                (none, at_target),
            ],
        ];
        for (from, row) in State::ALL.into_iter().zip(table) {
            for (target, (arcs, arrives)) in State::ALL.into_iter().zip(row) {
                assert_eq!(way(from, target), (arcs.to_vec(), arrives), "{from:?} to {target:?}");
            }
        }
    }

    #[test]
    fn numbers_of_linux() {
        use vfio_bindings::bindings::vfio as linux;
        let numbers = [
            linux::vfio_device_mig_state_VFIO_DEVICE_STATE_ERROR,
            linux::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP,
            linux::vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING,
            linux::vfio_device_mig_state_VFIO_DEVICE_STATE_STOP_COPY,
            linux::vfio_device_mig_state_VFIO_DEVICE_STATE_RESUMING,
        ];
        assert_eq!(State::ALL.map(State::number), numbers);
        assert_eq!(State::ALL.map(|state| State::from_number(state.number())), State::ALL.map(Some));
        // RUNNING_P2P, PRE_COPY, PRE_COPY_P2P, and numbers without a meaning.
        assert!([5, 6, 7, 8, u32::MAX].iter().all(|&number| State::from_number(number).is_none()));
    }
}
