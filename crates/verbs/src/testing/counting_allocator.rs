//! An allocator that counts the bytes of heap in use.
#![expect(unsafe_code, reason = "`GlobalAlloc` is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Allocator of the system with a count of bytes in use, shared by all threads of the process.
#[derive(Debug, Default)]
pub struct CountingAllocator {
    bytes: AtomicUsize,
}

impl CountingAllocator {
    /// Creates the allocator, with no bytes in use.
    pub const fn new() -> Self {
        Self { bytes: AtomicUsize::new(0) }
    }

    /// Returns the bytes in use, including the overhead of the allocator.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// Returns the heap memory that an allocation takes in glibc: its bytes and a word before them, in steps of 16 bytes.
const fn taken(layout: Layout) -> usize {
    let with_word = layout.size().saturating_add(8).next_multiple_of(16);
    if with_word < 32 { 32 } else { with_word }
}

// SAFETY: the allocator of the system does the work, with the arguments that came.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.bytes.fetch_add(taken(layout), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.bytes.fetch_sub(taken(layout), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { System.dealloc(pointer, layout) }
    }
}
