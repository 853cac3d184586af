//! Pages to which other threads or processes store: the present ones, to which stores go unnoticed, and the touched
//! ones.

use std::io;

use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, Step, has};

/// Pages that can be taken away, and that become present again when they are touched. Each such touch is reported.
#[derive(Debug)]
pub struct PresentPages {
    pages: Box<[Page]>,
    /// Held while pages are taken away, so that a thread that finds a page absent can rely on its absence. The thread
    /// that reports touches never takes this lock.
    taking: Mutex<()>,
    /// Number of touches so far. Incremented after the page is marked.
    events: AtomicU64,
}

#[derive(Debug)]
struct Page {
    /// The page is present or about to be: stores to it go unnoticed.
    present: AtomicBool,
    /// The page became present since the last [`PresentPages::take_touched`].
    touched: AtomicBool,
}

/// Guard: while it exists, no page is taken away.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct KeptPages<'a> {
    _taking: crate::sync::MutexGuard<'a, ()>,
}

/// Result of taking pages away.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Taken {
    /// Pages that are away.
    pub pages: u64,
    /// Pages that may still be present.
    pub failed: u64,
}

impl PresentPages {
    /// Creates `count` pages, none of them present.
    pub fn new(count: u32) -> Self {
        let page = |_| Page { present: AtomicBool::new(false), touched: AtomicBool::new(false) };
        Self { pages: (0..count).map(page).collect(), taking: Mutex::new(()), events: AtomicU64::new(0) }
    }

    /// Records that a page was touched. The page becomes present after this call.
    pub fn mark(&self, page: u32) {
        if let Some(page) = self.page(page) {
            page.present.store(true, Ordering::SeqCst);
            page.touched.store(true, Ordering::SeqCst);
            self.events.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Records that any page may have been touched.
    pub fn mark_all(&self) {
        (0..).zip(&self.pages).for_each(|(number, _)| self.mark(number));
    }

    fn page(&self, page: u32) -> Option<&Page> {
        self.pages.get(usize::try_from(page).ok()?)
    }

    /// Number of touches so far.
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::SeqCst)
    }

    /// Calls `f` with each page that was touched since the last call.
    pub fn take_touched(&self, mut f: impl FnMut(u32)) {
        for (number, page) in (0..).zip(&self.pages) {
            if page.touched.load(Ordering::SeqCst) && page.touched.swap(false, Ordering::SeqCst) {
                f(number);
            }
        }
    }

    /// Calls `f` with each present page.
    pub fn for_present(&self, mut f: impl FnMut(u32)) {
        for (number, page) in (0..).zip(&self.pages) {
            if page.present.load(Ordering::SeqCst) {
                f(number);
            }
        }
    }

    /// Waits until no page is being taken away. While the result exists, none is.
    #[cfg(not(loom))]
    pub fn keep(&self) -> KeptPages<'_> {
        KeptPages { _taking: self.taking.lock() }
    }

    /// Takes a page away. `remove` does the work and waits for a touch in progress. The next store to the page is a
    /// touch.
    ///
    /// # Errors
    /// Returns the error of `remove` (the page may still be present, and counts as touched), or an error if there is no
    /// such page.
    pub fn take_away(&self, page: u32, remove: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _taking = has(Step::Lock).then(|| self.taking.lock());
        self.take(page, remove)
    }

    /// Does the work of [`Self::take_away`]; the caller holds `taking`.
    fn take(&self, page: u32, remove: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let state = self.page(page).ok_or(io::ErrorKind::InvalidInput)?;
        // The flag is cleared before `remove`, so that a touch that races with the removal sets it again.
        if has(Step::Order) {
            state.present.store(false, Ordering::SeqCst);
        }
        let removed = remove();
        if !has(Step::Order) {
            state.present.store(false, Ordering::SeqCst);
        }
        // The page may still be present, and stores to it may go unnoticed. It counts as touched, so the next reader of
        // touched pages looks at it.
        removed.inspect_err(|_| self.mark(page))
    }

    /// Takes all present pages away, each with `remove`.
    pub fn take_all(&self, mut remove: impl FnMut(u32) -> io::Result<()>) -> Taken {
        let mut taken = Taken::default();
        let _taking = has(Step::Lock).then(|| self.taking.lock());
        self.for_present(|page| match self.take(page, || remove(page)) {
            Ok(()) => taken.pages = taken.pages.saturating_add(1),
            Err(_) => taken.failed = taken.failed.saturating_add(1),
        });
        taken
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn touched(pages: &PresentPages) -> Vec<u32> {
        let mut touched = Vec::new();
        pages.take_touched(|page| touched.push(page));
        touched
    }

    #[test]
    fn a_touch_is_reported_once() {
        let pages = PresentPages::new(3);
        pages.mark(2);
        pages.mark(0);
        assert_eq!((touched(&pages), touched(&pages), pages.events()), (vec![0, 2], vec![], 2));
        let mut removed = Vec::new();
        let taken = pages.take_all(|page| {
            removed.push(page);
            Ok(())
        });
        assert_eq!((removed, taken), (vec![0, 2], Taken { pages: 2, failed: 0 }));
        assert_eq!(pages.take_all(|_| Ok(())), Taken::default());
        pages.mark(1);
        assert_eq!(touched(&pages), [1]);
    }

    #[test]
    fn a_page_that_stays_counts_as_touched() {
        let pages = PresentPages::new(3);
        pages.mark(1);
        touched(&pages);
        let refuse = |_| Err(io::ErrorKind::Other.into());
        assert_eq!(pages.take_all(refuse), Taken { pages: 0, failed: 1 });
        assert_eq!((touched(&pages), pages.events()), (vec![1], 2));
        assert!(pages.take_away(1, || refuse(1)).is_err());
        let mut present = Vec::new();
        pages.for_present(|page| present.push(page));
        assert_eq!((present, touched(&pages), pages.events()), (vec![1], vec![1], 3));
    }

    #[test]
    fn a_page_that_is_none_changes_nothing() {
        let pages = PresentPages::new(3);
        pages.mark(3);
        assert_eq!((touched(&pages), pages.events()), (vec![], 0));
        assert_eq!(pages.take_away(3, || Ok(())).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
