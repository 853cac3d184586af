//! The table of connections, and the choice of the one to close when there are too many.

use std::time::Instant;

use pvrdma_base::Random;

use super::connection::{Connection, Origin, Stage};

/// Most connections without a complete request.
pub(super) const MAX_READING: usize = 16;
/// Maximum number of connections with a complete request, which wait for the text or read it.
pub(super) const MAX_ASKED: usize = 16;

/// All connections. Those with and those without a complete request are counted separately.
#[derive(Debug)]
pub(super) struct Table {
    connections: Vec<Connection>,
    random: Random,
}

impl Table {
    pub(super) const fn new(random: Random) -> Self {
        Self { connections: Vec::new(), random }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.connections.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.connections.iter_mut()
    }

    pub(super) fn push(&mut self, connection: Connection) {
        self.connections.push(connection);
    }

    /// Calls `step` with each connection, and closes those that have ended.
    pub(super) fn each(&mut self, step: impl FnMut(&mut Connection)) {
        self.connections.iter_mut().for_each(step);
        self.connections.retain(|connection| !matches!(connection.stage, Stage::Done));
    }

    /// Returns the time at which the first lifetime ends.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.connections.iter().map(|connection| connection.until).min()
    }

    /// Closes connections whose lifetime has ended.
    pub(super) fn expire(&mut self, now: Instant) {
        self.connections.retain(|connection| connection.until > now);
    }

    /// Closes connections while there are too many of a kind.
    pub(super) fn give_way(&mut self) {
        for (reading, most) in [(true, MAX_READING), (false, MAX_ASKED)] {
            loop {
                let of_kind = self.connections.iter().enumerate();
                let of_kind = of_kind.filter(|(_, connection)| connection.is_reading() == reading);
                let (indices, origins): (Vec<usize>, Vec<Origin>) =
                    of_kind.map(|(index, connection)| (index, connection.origin)).unzip();
                if indices.len() <= most {
                    break;
                }
                // Without a random number the first one is chosen.
                let drawn = self.random.draw().unwrap_or_default();
                let Some(index) = one_of_the_most(&origins, drawn).and_then(|at| indices.get(at)) else { break };
                self.connections.swap_remove(*index);
            }
        }
    }
}

/// Chooses a connection of the origin that has the most.
fn one_of_the_most(origins: &[Origin], drawn: u32) -> Option<usize> {
    let count = |origin: &Origin| origins.iter().filter(|other| *other == origin).count();
    let most = origins.iter().map(count).max()?;
    let equals: Vec<usize> =
        origins.iter().enumerate().filter(|(_, origin)| count(origin) == most).map(|(index, _)| index).collect();
    equals.get(usize::try_from(drawn).unwrap_or_default().checked_rem(equals.len())?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_origin_with_the_most_connections_gives_way() {
        let [a, b, c] = [Origin::Host(1), Origin::Host(2), Origin::User(1)];
        let origins = [a, b, c, b, a, b];
        let chosen: Vec<_> = (0..4).map(|drawn| one_of_the_most(&origins, drawn).unwrap()).collect();
        assert_eq!(chosen, [1, 3, 5, 1]);
        assert_eq!([0, 5].map(|drawn| one_of_the_most(&[a, b, c], drawn)), [Some(0), Some(2)]);
        assert_eq!(one_of_the_most(&[], 7), None);
    }
}
