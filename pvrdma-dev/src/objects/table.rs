//! Handle tables.
//!
//! Handles are allocated round-robin through the whole table. The driver clears its own slot of a destroyed object only
//! after the command: if the handle were reused immediately, the new object could be lost (section 2.5).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::RwLock;

/// Objects by handle. Any thread may look up; only the control plane, which runs one command at a time, changes the
/// table.
#[derive(Debug)]
pub(crate) struct HandleTable<T> {
    /// Kind of the objects, for messages.
    what: &'static str,
    /// First handle of the table.
    first: u32,
    /// End of the range of handles.
    end: AtomicU32,
    inner: RwLock<Inner<T>>,
}

#[derive(Debug)]
struct Inner<T> {
    /// Slots, which grow as handles are used for the first time.
    slots: Vec<Option<Arc<T>>>,
    live: u32,
    position: TablePosition,
}

/// State of a table that determines the handles of the next objects. All values are valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TablePosition {
    /// First handle to be allocated after [`HandleTable::drain`].
    pub(crate) begin: u32,
    /// First handle to try for the next object.
    pub(crate) next: u32,
    /// Number of passes through the table. A [`HandleTable::drain`] counts as one.
    pub(crate) rounds: u32,
}

/// Free handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Vacancy {
    /// Handle.
    pub(crate) handle: u32,
    /// Number of the pass. Differs from that of the previous use of the same handle.
    pub(crate) round: u32,
}

impl<T> HandleTable<T> {
    /// Creates a table of the handles `first..end`.
    pub(crate) const fn new(what: &'static str, first: u32, end: u32) -> Self {
        let position = TablePosition { begin: first, next: first, rounds: 0 };
        let inner = RwLock::new(Inner { slots: Vec::new(), live: 0, position });
        Self { what, first, end: AtomicU32::new(end), inner }
    }

    /// Creates a table whose first handle and first round are chosen by two random numbers.
    pub(crate) fn beginning(what: &'static str, handles: Range<u32>, (place, round): (u32, u32)) -> Self {
        let Range { start: first, end } = handles;
        let begin = first.saturating_add(place.checked_rem(end.saturating_sub(first)).unwrap_or(0));
        let position = TablePosition { begin, next: begin, rounds: round };
        let inner = RwLock::new(Inner { slots: Vec::new(), live: 0, position });
        Self { what, first, end: AtomicU32::new(end), inner }
    }

    /// Returns the kind of the objects.
    pub(crate) const fn what(&self) -> &'static str {
        self.what
    }

    /// Changes the end of the range. The table must be empty.
    pub(crate) fn set_end(&self, end: u32) {
        self.end.store(end, Ordering::Relaxed);
    }

    /// Returns the next handle to use, `None` if all are in use.
    pub(crate) fn vacancy(&self) -> Option<Vacancy> {
        let inner = self.inner.read();
        let TablePosition { begin: _, next, rounds } = inner.position;
        let free = |handle: &u32| inner.at(*handle).is_none();
        let end = self.end.load(Ordering::Relaxed);
        (next.max(self.first)..end).find(free).map(|handle| Vacancy { handle, round: rounds }).or_else(|| {
            let round = rounds.wrapping_add(1);
            (self.first..next.min(end)).find(free).map(|handle| Vacancy { handle, round })
        })
    }

    /// Stores an object at a free handle.
    pub(crate) fn insert(&self, vacancy: Vacancy, object: Arc<T>) {
        let mut inner = self.inner.write();
        inner.position.next = vacancy.handle.saturating_add(1);
        inner.position.rounds = vacancy.round;
        inner.put(vacancy.handle, object);
    }

    /// Stores an object at a given handle, which the table has not allocated.
    pub(crate) fn insert_at(&self, handle: u32, object: Arc<T>) {
        self.inner.write().put(handle, object);
    }

    /// Returns `true` if the table has this handle, in use or free.
    pub(crate) fn has_handle(&self, handle: u32) -> bool {
        (self.first..self.end.load(Ordering::Relaxed)).contains(&handle)
    }

    /// Returns the state that determines the next handles.
    pub(crate) fn position(&self) -> TablePosition {
        self.inner.read().position
    }

    /// Sets the state that determines the next handles.
    pub(crate) fn set_position(&self, position: TablePosition) {
        self.inner.write().position = position;
    }

    /// Returns the object with a handle.
    pub(crate) fn get(&self, handle: u32) -> Option<Arc<T>> {
        self.inner.read().at(handle).cloned()
    }

    /// Removes an object.
    pub(crate) fn remove(&self, handle: u32) -> Option<Arc<T>> {
        let mut inner = self.inner.write();
        let object = inner.slot(handle)?.take()?;
        inner.live = inner.live.saturating_sub(1);
        Some(object)
    }

    /// Removes all objects and frees the table's memory.
    pub(crate) fn drain(&self) -> Vec<Arc<T>> {
        let mut inner = self.inner.write();
        let slots = std::mem::take(&mut inner.slots);
        inner.live = 0;
        inner.position.next = inner.position.begin;
        inner.position.rounds = inner.position.rounds.wrapping_add(1);
        slots.into_iter().flatten().collect()
    }

    /// Returns all objects with their handles.
    pub(crate) fn all(&self) -> Vec<(u32, Arc<T>)> {
        let inner = self.inner.read();
        (0..).zip(&inner.slots).filter_map(|(handle, slot)| Some((handle, Arc::clone(slot.as_ref()?)))).collect()
    }

    /// Returns the handles of the objects that satisfy a condition.
    pub(crate) fn handles(&self, condition: impl Fn(&T) -> bool) -> Vec<u32> {
        let inner = self.inner.read();
        (0..).zip(&inner.slots).filter(|(_, s)| s.as_ref().is_some_and(|o| condition(o))).map(|(h, _)| h).collect()
    }

    /// Returns the number of objects.
    pub(crate) fn len(&self) -> u32 {
        self.inner.read().live
    }
}

impl<T> Inner<T> {
    fn at(&self, handle: u32) -> Option<&Arc<T>> {
        self.slots.get(usize::try_from(handle).ok()?)?.as_ref()
    }

    fn slot(&mut self, handle: u32) -> Option<&mut Option<Arc<T>>> {
        self.slots.get_mut(usize::try_from(handle).ok()?)
    }

    fn put(&mut self, handle: u32, object: Arc<T>) {
        let Ok(index) = usize::try_from(handle) else { return };
        if index >= self.slots.len() {
            self.slots.resize_with(index.saturating_add(1), || None);
        }
        if let Some(slot) = self.slots.get_mut(index)
            && slot.replace(object).is_none()
        {
            self.live = self.live.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn create(table: &HandleTable<u32>) -> Option<Vacancy> {
        let vacancy = table.vacancy()?;
        table.insert(vacancy, Arc::new(vacancy.handle));
        Some(vacancy)
    }

    /// Conformance 26.
    #[test]
    fn a_handle_comes_back_only_after_all_others() {
        let table = HandleTable::new("thing", 2, 6);
        let mut seen = Vec::new();
        for _ in 0..10 {
            let vacancy = create(&table).unwrap();
            seen.push((vacancy.handle, vacancy.round));
            table.remove(vacancy.handle).unwrap();
        }
        assert_eq!(seen, [(2, 0), (3, 0), (4, 0), (5, 0), (2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (3, 2)]);
    }

    /// The lowest eight bits of the round are part of a QPN. They stay consecutive when the round wraps.
    #[test]
    fn rounds_stay_consecutive_at_the_wrap() {
        let table = HandleTable::new("thing", 2, 4);
        table.inner.write().position.rounds = u32::MAX - 1;
        let rounds: Vec<u32> = (0..6)
            .map(|_| {
                let vacancy = create(&table).unwrap();
                table.remove(vacancy.handle).unwrap();
                vacancy.round & 0xff
            })
            .collect();
        assert_eq!(rounds, [0xfe, 0xfe, 0xff, 0xff, 0, 0]);
    }

    #[test]
    fn a_full_table_has_no_vacancy() {
        let table = HandleTable::new("thing", 1, 4);
        assert_eq!((0..5).filter_map(|_| create(&table)).count(), 3);
        assert_eq!(table.len(), 3);
        assert_eq!(*table.remove(2).unwrap(), 2);
        assert!(table.remove(2).is_none());
        assert_eq!(table.vacancy(), Some(Vacancy { handle: 2, round: 1 }));
        assert!(create(&table).is_some());
        assert!(table.vacancy().is_none());
        assert_eq!(table.handles(|v| *v != 2), [1, 3]);
        for unknown in [0, 4, 5, u32::MAX] {
            assert!(table.get(unknown).is_none() && table.remove(unknown).is_none());
        }
    }

    /// Regression: the first QP of each guest had the same QPN.
    #[test]
    fn a_table_begins_at_a_random_number() {
        let table = HandleTable::beginning("thing", 2..6, (0xffff_fff2, 7));
        let seen: Vec<_> = (0..6)
            .map(|_| {
                let vacancy = create(&table).unwrap();
                table.remove(vacancy.handle).unwrap();
                (vacancy.handle, vacancy.round)
            })
            .collect();
        assert_eq!(seen, [(4, 7), (5, 7), (2, 8), (3, 8), (4, 8), (5, 8)]);
        for place in 0..20 {
            let table = HandleTable::beginning("thing", 2..6, (place, 0));
            assert!((2..6).contains(&create(&table).unwrap().handle));
        }
        // An empty range has no free handle, whatever the random numbers are.
        assert_eq!(HandleTable::<u32>::beginning("thing", 2..2, (3, 0)).vacancy(), None);
    }

    #[test]
    fn draining_empties_and_starts_over_in_another_round() {
        let table = HandleTable::new("thing", 2, 100);
        for _ in 0..5 {
            create(&table);
        }
        table.insert_at(1, Arc::new(7));
        assert_eq!(table.drain().len(), 6);
        assert_eq!(table.len(), 0);
        assert_eq!(table.vacancy(), Some(Vacancy { handle: 2, round: 1 }));
    }
}
