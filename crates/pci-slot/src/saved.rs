//! MSI-X tables and pending bits of a slot, for a VMM that saves a machine.

use crate::msix::SavedVector;
use crate::slot::Slot;

impl Slot {
    /// Returns the MSI-X table and the pending bits of all functions. The functions must be paused or idle.
    pub fn save_vectors(&self) -> Vec<SavedVector> {
        self.all_vectors().flat_map(|(function, vectors)| vectors.save(function)).collect()
    }

    /// Restores MSI-X tables and pending bits, then decodes the BARs and takes MSI-X Enable and Function Mask from
    /// configuration space, which must be restored already. Pending interrupts of open vectors are sent. Vectors that
    /// no function has are ignored.
    pub fn restore_vectors(&self, saved: &[SavedVector]) {
        for (function, vectors) in self.all_vectors() {
            vectors.restore(saved.iter().filter(|saved| saved.function == function));
        }
        self.follow_config();
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use pvrdma_pci_function::{
        Bar, CONFIG_SIZE, ConfigLayout, ConfigSpace, Deferred, Identity, InterruptSink, MsixPlace, PciFunction,
    };

    use super::*;
    use crate::{InterruptLine, Message};

    const MSIX: MsixPlace = MsixPlace { capability: 0x40, vectors: 3, bar: 0, table: 0, pending: 0x800 };
    const BAR: u64 = 0xc000_0000;
    const UNMASKED: [u8; 4] = [0; 4];

    /// A function with nothing but configuration space.
    struct Plain(Mutex<ConfigSpace>);

    impl PciFunction for Plain {
        fn bars(&self) -> [Option<Bar>; 6] {
            self.0.lock().bars()
        }

        fn config_size(&self) -> usize {
            CONFIG_SIZE
        }

        fn config_read(&self, offset: usize, data: &mut [u8]) {
            self.0.lock().read(offset, data, false);
        }

        fn config_write(&self, offset: usize, data: &[u8]) {
            self.0.lock().write(offset, data);
        }

        fn bar_read(&self, _bar: usize, _offset: u64, _data: &mut [u8]) {}

        fn bar_write(&self, _bar: usize, _offset: u64, _data: &[u8]) -> Deferred {
            Deferred::Nothing
        }

        fn run_deferred(&self) {}

        fn msix(&self) -> Option<MsixPlace> {
            Some(MSIX)
        }

        fn reset(&self) {}
    }

    /// Data of the messages that were sent.
    type Sent = Arc<Mutex<Vec<u32>>>;

    /// A line that records the data of each message that it sends.
    #[derive(Clone, Default)]
    struct Line(Sent, Arc<Mutex<u32>>);

    impl InterruptLine for Line {
        fn route(&self, message: Message) -> io::Result<()> {
            *self.1.lock() = message.data;
            Ok(())
        }

        fn trigger(&self) {
            self.0.lock().push(*self.1.lock());
        }
    }

    /// Returns a function, its slot with a sink for its interrupts, and the messages that were sent.
    fn slot() -> (Arc<Plain>, Arc<Slot>, Arc<crate::MsixVectors>, Sent) {
        let bars = [Some(Bar { size: 0x1000, is_64bit: false }), None, None, None, None, None];
        let identity = Identity { vendor: 1, device: 2, revision: 0, class: [0; 3] };
        let layout = ConfigLayout { identity, bars, msix: Some(MSIX), interrupt_pin: false, multifunction: false };
        let function = Arc::new(Plain(Mutex::new(ConfigSpace::new(&layout))));
        let (builder, sent) = (Slot::builder(1), Sent::default());
        let interrupts = builder.interrupts(0);
        let slot = builder.with(0, Arc::<Plain>::clone(&function)).build().unwrap();
        slot.connect(|| Ok(Line(Arc::clone(&sent), Arc::default()))).unwrap();
        (function, slot, interrupts, sent)
    }

    /// A pending interrupt of an open vector is sent after the restore, one of a masked vector when it is unmasked.
    #[test]
    fn pending_interrupts_survive() {
        let (function, source, interrupts, sent) = slot();
        source.config_write(0, 0x10, &u32::try_from(BAR).unwrap().to_le_bytes());
        source.config_write(0, 4, &[6, 0]);
        source.config_write(0, 0x42, &[0, 0xc0]);
        for vector in 0..2_u8 {
            source.memory_write(BAR + 16 * u64::from(vector) + 8, &[7 + vector, 0, 0, 0]);
            interrupts.msix(vector.into());
        }
        source.memory_write(BAR + 12, &UNMASKED);
        let saved = source.save_vectors();
        assert_eq!((saved.len(), sent.lock().len()), (3, 0), "Function Mask is set");
        assert_eq!(
            saved.iter().map(|vector| (vector.masked, vector.pending)).collect::<Vec<_>>(),
            [(false, true), (true, true), (true, false)]
        );

        let mut config = [0; CONFIG_SIZE];
        function.config_read(0, &mut config);
        config[0x43] = 0x80;
        let (function, slot, interrupts, sent) = slot();
        // The VMM restores configuration space behind the slot.
        function.config_write(0, &config);
        let surplus = SavedVector { vector: 3, ..SavedVector::default() };
        slot.restore_vectors(&[&saved[..], &[surplus, SavedVector { function: 7, ..surplus }]].concat());
        assert_eq!(*sent.lock(), [7]);
        slot.memory_write(BAR + 16 + 12, &UNMASKED);
        assert_eq!(*sent.lock(), [7, 8], "the BAR is decoded");
        interrupts.msix(0);
        assert_eq!(*sent.lock(), [7, 8, 7]);
    }
}
