//! Writes frames as pcapng, the format of Wireshark.

use std::borrow::Cow;
use std::io::{self, Write};
use std::time::SystemTime;

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption};
use pcap_file::pcapng::blocks::interface_statistics::{InterfaceStatisticsBlock, InterfaceStatisticsOption};
use pcap_file::pcapng::blocks::section_header::{SectionHeaderBlock, SectionHeaderOption};
use pcap_file::{DataLink, Endianness, PcapError};
use pvrdma_rxe::capture::{Batch, Capture, Direction, Interface};

/// Interfaces in the order of their numbers in the file.
const INTERFACES: [Interface; 2] = [Interface::Uplink, Interface::Local];

/// Resolution of timestamps: nanoseconds, 10^-9 s.
const NANOSECONDS: u8 = 9;

/// Writer of a capture file.
pub(super) struct File<W: Write>(PcapNgWriter<W>);

impl<W: Write> File<W> {
    /// Writes the blocks that precede the first frame.
    pub(super) fn begin(out: W, device: &str, snaplen: u32) -> io::Result<Self> {
        let section = SectionHeaderBlock {
            // The library writes the timestamp of statistics in the right order only for big endian.
            endianness: Endianness::Big,
            options: vec![SectionHeaderOption::UserApplication(Cow::Borrowed(concat!(
                "pvrdmad ",
                env!("CARGO_PKG_VERSION")
            )))],
            ..SectionHeaderBlock::default()
        };
        let mut file = Self(PcapNgWriter::with_section_header(out, section).map_err(io_error)?);
        for interface in INTERFACES {
            let (word, meaning) = match interface {
                Interface::Uplink => ("uplink", "frames on the uplink"),
                Interface::Local => ("local", "deliveries within the host, as the packets that they would have been"),
            };
            let options = vec![
                InterfaceDescriptionOption::IfName(Cow::Owned(format!("{device}-{word}"))),
                InterfaceDescriptionOption::IfDescription(Cow::Borrowed(meaning)),
                InterfaceDescriptionOption::IfTsResol(NANOSECONDS),
            ];
            let block = InterfaceDescriptionBlock { linktype: DataLink::ETHERNET, snaplen, options };
            file.0.write_pcapng_block(block).map_err(io_error)?;
        }
        Ok(file)
    }

    /// Writes frames.
    pub(super) fn frames(&mut self, batch: &Batch) -> io::Result<()> {
        for (seen, frame) in batch.iter() {
            let direction = match seen.direction {
                Direction::Inbound => 1,
                Direction::Outbound => 2,
            };
            let block = EnhancedPacketBlock {
                interface_id: number(seen.interface),
                timestamp: seen.time,
                original_len: u32::try_from(seen.length).unwrap_or(u32::MAX),
                data: Cow::Borrowed(frame),
                options: vec![EnhancedPacketOption::Flags(direction)],
            };
            self.0.write_pcapng_block(block).map_err(io_error)?;
        }
        Ok(())
    }

    /// Flushes the output.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.0.get_mut().flush()
    }

    /// Writes the number of captured and of missing frames.
    pub(super) fn end(mut self, capture: &Capture) -> io::Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        for interface in INTERFACES {
            let (seen, dropped) = capture.counts(interface);
            let block = InterfaceStatisticsBlock {
                interface_id: number(interface),
                timestamp: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
                options: vec![
                    InterfaceStatisticsOption::IsbIfRecv(seen),
                    InterfaceStatisticsOption::IsbIfDrop(dropped),
                ],
            };
            self.0.write_pcapng_block(block).map_err(io_error)?;
        }
        self.flush()
    }
}

const fn number(interface: Interface) -> u32 {
    match interface {
        Interface::Uplink => 0,
        Interface::Local => 1,
    }
}

fn io_error(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}
