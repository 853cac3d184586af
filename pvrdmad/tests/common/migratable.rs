//! Saving and restoring the test function, and the messages of a client that migrates it.

use std::io::{Read, Write};

use pvrdma_pci_function::{Migratable, StateError};
use pvrdma_vfio_user_server::message::Command;

use super::{Answer, Event, Raw, TestFunction, words};

/// Payload that a restore refuses.
pub const REFUSED: u8 = 0xee;
/// Payload with which a resume fails, as if memory were missing.
pub const MEMORY_MISSING: u8 = 0xed;

/// State of a pause, and the results that the test prescribes.
#[derive(Debug, Default)]
pub struct Paused {
    pub paused: bool,
    /// Payload of the next save.
    pub payload: Vec<u8>,
    /// The next save fails.
    pub unsavable: bool,
    memory_missing: bool,
}

/// The encoded state: the length of the payload, then the payload.
pub fn state(payload: &[u8]) -> Vec<u8> {
    [&u32::try_from(payload.len()).unwrap().to_le_bytes(), payload].concat()
}

impl Migratable for TestFunction {
    fn pause(&self) {
        if !std::mem::replace(&mut self.paused.lock().unwrap().paused, true) {
            self.note(Event::Pause);
        }
    }

    fn save(&self, to: &mut dyn Write) -> Result<(), StateError> {
        let paused = self.paused.lock().unwrap();
        assert!(paused.paused, "a function is saved only while it is paused");
        self.note(Event::Save);
        if paused.unsavable {
            return Err("an object in the way".into());
        }
        Ok(to.write_all(&state(&paused.payload))?)
    }

    fn restore(&self, from: &mut dyn Read) -> Result<(), StateError> {
        self.paused.lock().unwrap().paused = false;
        let mut len = [0; 4];
        from.read_exact(&mut len)?;
        let mut payload = Vec::new();
        from.take(u32::from_le_bytes(len).into()).read_to_end(&mut payload)?;
        if payload.len() != u32::from_le_bytes(len) as usize || payload.first() == Some(&REFUSED) {
            return Err("a state that is not one".into());
        }
        let mut paused = self.paused.lock().unwrap();
        (paused.paused, paused.memory_missing) = (true, payload.first() == Some(&MEMORY_MISSING));
        self.note(Event::Restore(payload));
        Ok(())
    }

    fn resume(&self) -> Result<(), StateError> {
        let mut paused = self.paused.lock().unwrap();
        if std::mem::take(&mut paused.memory_missing) {
            paused.paused = false;
            return Err("memory is missing".into());
        }
        if std::mem::take(&mut paused.paused) {
            self.note(Event::Resume);
        }
        Ok(())
    }
}

pub const ERROR: u32 = 0;
pub const STOP: u32 = 1;
pub const RUNNING: u32 = 2;
pub const STOP_COPY: u32 = 3;
pub const RESUMING: u32 = 4;

pub const GET: u32 = 1 << 16;
pub const SET: u32 = 1 << 17;
pub const PROBE: u32 = 1 << 18;

pub const MIGRATION: u32 = 1;
pub const DEVICE_STATE: u32 = 2;
pub const LOG_START: u32 = 6;
pub const LOG_STOP: u32 = 7;
pub const LOG_REPORT: u32 = 8;
pub const DATA_SIZE: u32 = 9;

impl Raw {
    /// Sends a request for a feature, with room for any reply.
    pub fn feature(&mut self, flags: u32, data: &[u8]) -> Answer {
        let body = [&words(&[u32::MAX, flags]), data].concat();
        self.call(Command::DEVICE_FEATURE, &body, &[])
    }

    pub fn set_state(&mut self, state: u32) -> Answer {
        self.feature(SET | DEVICE_STATE, &words(&[state, u32::MAX]))
    }

    pub fn state(&mut self) -> u32 {
        let body = self.feature(GET | DEVICE_STATE, &[]).ok();
        assert_eq!((&body[..8], &body[12..]), (&words(&[16, GET | DEVICE_STATE])[..], &[0; 4][..]));
        u32::from_le_bytes(body[8..12].try_into().unwrap())
    }

    pub fn data_size(&mut self) -> u64 {
        u64::from_le_bytes(self.feature(GET | DATA_SIZE, &[]).ok()[8..].try_into().unwrap())
    }

    pub fn read_data(&mut self, size: u32) -> Answer {
        self.call(Command::MIG_DATA_READ, &words(&[8 + size, size]), &[])
    }

    pub fn write_data(&mut self, data: &[u8]) -> Answer {
        let size = u32::try_from(data.len()).unwrap();
        self.call(Command::MIG_DATA_WRITE, &[&words(&[8 + size, size]), data].concat(), &[])
    }

    /// Reads the whole state in parts, to the first one that is shorter.
    pub fn read_all_data(&mut self, size: u32) -> Vec<u8> {
        let mut data = Vec::new();
        loop {
            let body = self.read_data(size).ok();
            let count = u32::from_le_bytes(body[4..8].try_into().unwrap());
            assert_eq!(
                (u32::from_le_bytes(body[..4].try_into().unwrap()), body.len()),
                (8 + count, 8 + count as usize)
            );
            data.extend(&body[8..]);
            if count < size {
                return data;
            }
        }
    }

    pub fn start_log(&mut self, ranges: &[(u64, u64)]) -> Answer {
        let mut data = [&4096_u64.to_le_bytes()[..], &words(&[u32::try_from(ranges.len()).unwrap(), 0])].concat();
        ranges.iter().for_each(|(iova, len)| data.extend([iova.to_le_bytes(), len.to_le_bytes()].concat()));
        self.feature(SET | LOG_START, &data)
    }

    pub fn stop_log(&mut self) -> Answer {
        self.feature(SET | LOG_STOP, &[])
    }

    /// Returns the bitmap of written pages.
    pub fn report(&mut self, iova: u64, length: u64, page_size: u64) -> Answer {
        self.feature(GET | LOG_REPORT, &[iova, length, page_size].map(u64::to_le_bytes).concat())
    }

    /// Returns the numbers of the written pages of 4 KiB in a range.
    pub fn written_pages(&mut self, iova: u64, length: u64) -> Vec<u64> {
        let body = self.report(iova, length, 4096).ok();
        assert_eq!(body[8..32], [iova, length, 4096].map(u64::to_le_bytes).concat());
        let words = body[32..].chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        let bits = words
            .zip(0..)
            .flat_map(|(word, at)| (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| at * 64 + bit));
        bits.collect()
    }
}
