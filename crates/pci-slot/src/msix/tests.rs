use std::sync::Arc;

use super::*;

/// Records the calls.
#[derive(Clone, Default)]
struct Recording(Arc<Mutex<Vec<String>>>, Arc<Mutex<bool>>);

impl InterruptLine for Recording {
    fn route(&self, message: Message) -> io::Result<()> {
        if *self.1.lock() {
            return Err(io::Error::other("no more"));
        }
        self.0.lock().push(format!("route {:x} {:x}", message.address, message.data));
        Ok(())
    }

    fn trigger(&self) {
        self.0.lock().push("trigger".to_owned());
    }
}

impl Recording {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock())
    }
}

fn vectors(count: u16) -> (MsixVectors, Recording) {
    let (vectors, line) = (MsixVectors::default(), Recording::default());
    vectors.set_count(count);
    vectors.connect(&mut || Ok(line.clone())).unwrap();
    (vectors, line)
}

fn word(vectors: &MsixVectors, offset: u64) -> u32 {
    let mut data = [0; 4];
    vectors.table_read(offset, &mut data);
    u32::from_le_bytes(data)
}

fn pending(vectors: &MsixVectors) -> u32 {
    let mut data = [0; 4];
    vectors.pending_read(0, &mut data);
    u32::from_le_bytes(data)
}

fn program(vectors: &MsixVectors, vector: u64, data: u32) {
    for (offset, value) in [(0, 0xfee0_1000), (4, 0), (8, data), (12, 0)] {
        vectors.table_write(vector * 16 + offset, &u32::to_le_bytes(value));
    }
}

#[test]
fn a_vector_goes_where_the_table_says() {
    let (vectors, line) = vectors(3);
    program(&vectors, 1, 0x41);
    vectors.msix(1);
    assert!(line.take().is_empty(), "MSI-X is off, and forgets");
    vectors.set_control(CONTROL_ENABLE);
    assert_eq!(line.take(), ["route fee01000 41"]);
    vectors.msix(1);
    vectors.msix(1);
    assert_eq!(line.take(), ["trigger", "trigger"]);
    vectors.table_write(16 + 8, &[0x42, 0, 0, 0]);
    vectors.msix(1);
    assert_eq!(line.take(), ["route fee01000 42", "trigger"]);
    assert_eq!([16, 20, 24, 28].map(|at| word(&vectors, at)), [0xfee0_1000, 0, 0x42, 0]);
}

#[test]
fn a_masked_vector_is_pending_and_fires_once() {
    let (vectors, line) = vectors(40);
    vectors.set_control(CONTROL_ENABLE);
    assert_eq!(word(&vectors, 12), 1, "masked at power-on");
    vectors.msix(0);
    vectors.msix(0);
    assert_eq!((line.take(), pending(&vectors)), (vec![], 1));
    program(&vectors, 0, 0x41);
    assert_eq!(pending(&vectors), 0);
    assert_eq!(line.take(), ["route fee01000 41", "trigger"]);
    // Function Mask holds back all vectors.
    program(&vectors, 39, 0x50);
    vectors.set_control(CONTROL_ENABLE | CONTROL_MASKED);
    line.take();
    vectors.msix(39);
    vectors.msix(0);
    let mut second = [0; 8];
    vectors.pending_read(0, &mut second);
    assert_eq!(u64::from_le_bytes(second), 1 << 39 | 1);
    vectors.set_control(CONTROL_ENABLE);
    assert_eq!(line.take(), ["trigger", "trigger"]);
    vectors.msix(40);
    assert!(line.take().is_empty(), "no such vector");
}

#[test]
fn odd_accesses_mean_nothing() {
    let (vectors, line) = vectors(2);
    vectors.set_control(CONTROL_ENABLE);
    for (offset, len) in [(12, 1), (12, 2), (13, 4), (4, 8), (8, 16), (32, 4), (u64::MAX - 3, 4)] {
        vectors.table_write(offset, &vec![0xaa; len]);
        let mut data = vec![7; len];
        vectors.table_read(offset, &mut data);
        let zero = !matches!((offset, len), (12, _));
        assert!(!zero || data.iter().all(|byte| *byte == 0), "{offset} {len}");
    }
    assert_eq!([0, 4, 8, 12].map(|at| word(&vectors, at)), [0, 0, 0, 1]);
    vectors.table_write(8, &0x1_0000_0041_u64.to_le_bytes());
    assert_eq!([8, 12].map(|at| word(&vectors, at)), [0x41, 1], "eight bytes are two registers");
    assert!(line.take().is_empty());
}

#[test]
fn a_line_that_refuses_is_counted_and_retried() {
    let (vectors, line) = vectors(1);
    *line.1.lock() = true;
    vectors.set_control(CONTROL_ENABLE);
    program(&vectors, 0, 0x41);
    vectors.msix(0);
    assert_eq!((vectors.unrouted(), line.take()), (2, vec![]));
    *line.1.lock() = false;
    vectors.msix(0);
    assert_eq!(line.take(), ["route fee01000 41", "trigger"]);
}

#[test]
fn a_reset_forgets_all_but_the_lines() {
    let (vectors, line) = vectors(1);
    vectors.set_control(CONTROL_ENABLE);
    program(&vectors, 0, 0x41);
    vectors.table_write(12, &[1, 0, 0, 0]);
    vectors.msix(0);
    vectors.reset();
    line.take();
    assert_eq!((word(&vectors, 0), word(&vectors, 12), pending(&vectors)), (0, 1, 0));
    vectors.set_control(CONTROL_ENABLE);
    program(&vectors, 0, 0x41);
    vectors.msix(0);
    assert_eq!(line.take(), ["trigger"]);
}
