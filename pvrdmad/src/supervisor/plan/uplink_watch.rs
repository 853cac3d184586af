//! State of the interfaces of an uplink, and the choice of the active one.

use std::io;
use std::os::fd::BorrowedFd;

use pvrdma_ether_link::backup::Member;
use pvrdma_ether_link::{InterfaceName, InterfaceState, InterfaceWatch};

/// Source of interface states: a real interface, or a fake one in tests.
pub(in crate::supervisor) trait Watched: Send + 'static {
    /// State of the interfaces.
    type Seen: Copy + PartialEq + Send;

    /// Returns a descriptor that is readable when the state may have changed.
    fn hints(&self) -> BorrowedFd<'_>;

    /// # Errors
    /// The state cannot be read.
    fn look(&mut self) -> io::Result<Self::Seen>;
}

/// State of the interfaces of an uplink at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::supervisor) struct UplinkState {
    first: InterfaceState,
    /// `None` if the uplink has one interface.
    second: Option<InterfaceState>,
    /// The interface that carries the frames.
    pub(in crate::supervisor) active: Member,
}

impl UplinkState {
    /// State of an uplink with one interface.
    #[cfg(test)]
    pub(in crate::supervisor) const fn of(first: InterfaceState) -> Self {
        Self { first, second: None, active: Member::First }
    }

    /// Chooses the active interface: the present one while it is up, and the other one if only that is up.
    fn choose(first: InterfaceState, second: Option<InterfaceState>, present: Member) -> Self {
        let Some(other) = second else { return Self { first, second, active: Member::First } };
        let is_up = |member: Member| member.of(&[first, other]).is_up();
        let active = if !is_up(present) && is_up(present.other()) { present.other() } else { present };
        Self { first, second, active }
    }

    /// Returns the state of the active interface, with the smaller MTU of both.
    pub(in crate::supervisor) fn state(self) -> InterfaceState {
        let state = *self.active.of(&[self.first, self.second.unwrap_or(self.first)]);
        let mtus = [Some(self.first), self.second].into_iter().flatten().filter_map(InterfaceState::mtu);
        let Some(mtu) = mtus.min() else { return state };
        match state {
            InterfaceState::Absent => InterfaceState::Absent,
            InterfaceState::Down { .. } => InterfaceState::Down { mtu },
            InterfaceState::NoCarrier { .. } => InterfaceState::NoCarrier { mtu },
            InterfaceState::Up { .. } => InterfaceState::Up { mtu },
        }
    }

    /// Returns the state of the interface that is not active, if there are two.
    pub(in crate::supervisor) fn backup(self) -> Option<InterfaceState> {
        self.second.map(|second| *self.active.other().of(&[self.first, second]))
    }

    /// Returns the MTUs of both interfaces if they differ.
    pub(in crate::supervisor) fn different_mtus(self) -> Option<[u32; 2]> {
        let (first, second) = (self.first.mtu()?, self.second?.mtu()?);
        (first != second).then_some([first, second])
    }
}

/// Returns the message about the different MTUs of two interfaces.
pub(in crate::supervisor) fn mtu_words(interfaces: &str, [first, second]: [u32; 2]) -> String {
    format!("{interfaces} carry packets of {first} and {second} bytes: the smaller MTU counts")
}

/// Watches the interfaces of an uplink.
#[derive(Debug)]
pub(in crate::supervisor) struct UplinkWatch {
    first: InterfaceWatch,
    second: Option<InterfaceWatch>,
    active: Member,
}

impl UplinkWatch {
    /// Starts to watch one interface, or two. No later change is missed.
    ///
    /// # Errors
    /// The system provides no netlink socket, or has no descriptors left.
    pub(in crate::supervisor) fn open(first: &InterfaceName, second: Option<&InterfaceName>) -> io::Result<Self> {
        let first = InterfaceWatch::open(first.clone())?;
        let second = second.map(|name| InterfaceWatch::open(name.clone())).transpose()?;
        Ok(Self { first, second, active: Member::First })
    }
}

impl Watched for UplinkWatch {
    type Seen = UplinkState;

    fn hints(&self) -> BorrowedFd<'_> {
        // One socket suffices, because hints tell of all interfaces of the host. `look` discards them before it queries
        // either interface.
        self.first.hints()
    }

    fn look(&mut self) -> io::Result<UplinkState> {
        let first = self.first.look()?;
        let second = self.second.as_mut().map(InterfaceWatch::look).transpose()?;
        let state = UplinkState::choose(first, second, self.active);
        self.active = state.active;
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UP: InterfaceState = InterfaceState::Up { mtu: 9000 };
    const SHORT: InterfaceState = InterfaceState::Up { mtu: 1500 };
    const CUT: InterfaceState = InterfaceState::NoCarrier { mtu: 9000 };

    #[test]
    fn the_active_interface_changes_only_if_it_must() {
        use InterfaceState::Absent;
        use Member::{First, Second};

        for (first, second, present, active) in [
            (UP, UP, First, First),
            (UP, UP, Second, Second),
            (CUT, UP, First, Second),
            (Absent, UP, First, Second),
            (InterfaceState::Down { mtu: 9000 }, UP, First, Second),
            (UP, CUT, Second, First),
            (CUT, Absent, First, First),
            (CUT, CUT, Second, Second),
        ] {
            let state = UplinkState::choose(first, Some(second), present);
            assert_eq!(state.active, active, "{first} {second}");
            assert_eq!(state.state().is_up(), first == UP || second == UP);
        }
        assert_eq!(UplinkState::choose(CUT, None, First).active, First);
    }

    #[test]
    fn the_smaller_mtu_counts() {
        let both = |first, second| UplinkState::choose(first, Some(second), Member::First);
        assert_eq!((both(UP, SHORT).state(), both(UP, SHORT).different_mtus()), (SHORT, Some([9000, 1500])));
        assert_eq!((both(SHORT, UP).state(), both(CUT, UP).different_mtus()), (SHORT, None));
        assert_eq!(both(UP, InterfaceState::Absent).state(), UP);
        assert_eq!(both(CUT, SHORT).backup(), Some(CUT));
        let alone = UplinkState::choose(UP, None, Member::First);
        assert_eq!((alone.state(), alone.backup(), alone.different_mtus()), (UP, None, None));
    }
}
