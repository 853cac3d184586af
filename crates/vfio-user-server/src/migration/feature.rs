//! DEVICE_FEATURE requests: the features of a migration, with the numbers of Linux' `vfio.h`.

use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT, VFIO_DEVICE_FEATURE_DMA_LOGGING_START,
    VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP, VFIO_DEVICE_FEATURE_GET, VFIO_DEVICE_FEATURE_MASK,
    VFIO_DEVICE_FEATURE_MIG_DATA_SIZE, VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE, VFIO_DEVICE_FEATURE_MIGRATION,
    VFIO_DEVICE_FEATURE_PROBE, VFIO_DEVICE_FEATURE_SET,
};

use super::state::MigrationState;
use crate::fields::Fields;
use crate::message::MAX_DATA_XFER_SIZE;

/// Size of a feature's head: the space for it and its flags.
const HEAD: u32 = 8;
/// Size of the data of the features that have one number.
const NUMBER: u32 = 8;
/// Size of the fixed part of a report.
const REPORT: u32 = 24;
/// Size of a range of the log.
const RANGE: usize = 16;

/// Request for a feature, with all its sizes checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Feature<'a> {
    /// Checks that operations are supported. Answered by a copy of the request.
    Probe,
    /// Asks for the states beyond RUNNING and ERROR.
    Migration,
    /// Asks for the state.
    GetState,
    /// Changes the state.
    SetState(MigrationState),
    /// Asks for the size of the saved state.
    DataSize,
    /// Starts the log of written pages.
    StartLog(LogRanges<'a>),
    /// Ends the log of written pages.
    StopLog,
    /// Asks for the pages written since the last report.
    ReportLog {
        /// First address.
        iova: u64,
        /// Length in bytes.
        length: u64,
        /// Bytes for each bit.
        page_size: u64,
    },
}

/// Ranges of the log of written pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogRanges<'a>(&'a [[u8; RANGE]]);

impl LogRanges<'_> {
    /// Returns the ranges: first address and bytes.
    pub fn to_vec(&self) -> Vec<(u64, u64)> {
        let number = |half: Option<&[u8; 8]>| half.map_or(0, |half| u64::from_le_bytes(*half));
        let pair = |range: &[u8; RANGE]| (number(range.first_chunk()), number(range.last_chunk()));
        self.0.iter().map(pair).collect()
    }
}

impl<'a> Feature<'a> {
    /// Parses the body of a request.
    ///
    /// # Errors
    /// The feature is unknown (`ENOTTY`), or the operation, its sizes or its values are invalid (`EINVAL`).
    pub(crate) fn parse(fields: &mut Fields<'a>) -> Result<Self, Errno> {
        let room = fields.argsz(HEAD)?;
        let flags = fields.u32()?;
        let feature = flags & VFIO_DEVICE_FEATURE_MASK;
        let operation = flags & !VFIO_DEVICE_FEATURE_MASK;
        let supported = match feature {
            VFIO_DEVICE_FEATURE_MIGRATION
            | VFIO_DEVICE_FEATURE_MIG_DATA_SIZE
            | VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT => VFIO_DEVICE_FEATURE_GET,
            VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE => VFIO_DEVICE_FEATURE_GET | VFIO_DEVICE_FEATURE_SET,
            VFIO_DEVICE_FEATURE_DMA_LOGGING_START | VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP => VFIO_DEVICE_FEATURE_SET,
            _ => return Err(Errno::NOTTY),
        };
        if operation & !(supported | VFIO_DEVICE_FEATURE_PROBE) != 0 {
            return Err(Errno::INVAL);
        }
        if operation & VFIO_DEVICE_FEATURE_PROBE != 0 {
            return Ok(Self::Probe);
        }
        // A request that is no probe names exactly one of the two operations.
        let set = match operation {
            VFIO_DEVICE_FEATURE_GET => false,
            VFIO_DEVICE_FEATURE_SET => true,
            _ => return Err(Errno::INVAL),
        };
        let fits = |size: u32| if room >= HEAD + size { Ok(()) } else { Err(Errno::INVAL) };
        match (feature, set) {
            (VFIO_DEVICE_FEATURE_MIGRATION, _) => fits(NUMBER).map(|()| Self::Migration),
            (VFIO_DEVICE_FEATURE_MIG_DATA_SIZE, _) => fits(NUMBER).map(|()| Self::DataSize),
            (VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE, false) => fits(NUMBER).map(|()| Self::GetState),
            (VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE, true) => {
                // The second half is a descriptor in Linux' interface, which has no meaning on a socket.
                let (number, _) = (fields.u32()?, fields.u32()?);
                fields.end()?;
                MigrationState::from_number(number).map(Self::SetState).ok_or(Errno::INVAL)
            }
            (VFIO_DEVICE_FEATURE_DMA_LOGGING_START, _) => Self::parse_start(fields),
            (VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP, _) => Ok(Self::StopLog),
            _ => {
                let (iova, length, page_size) = (fields.u64()?, fields.u64()?, fields.u64()?);
                let bytes = report_size(length, page_size).ok_or(Errno::INVAL)?;
                fits(REPORT.saturating_add(bytes)).map(|()| Self::ReportLog { iova, length, page_size })
            }
        }
    }

    fn parse_start(fields: &mut Fields<'a>) -> Result<Self, Errno> {
        let (page_size, count, _reserved) = (fields.u64()?, fields.u32()?, fields.u32()?);
        // The client's wish for the unit of the log. Each report has a unit of its own.
        if page_size != 0 && !page_size.is_power_of_two() {
            return Err(Errno::INVAL);
        }
        let (ranges, []) = fields.rest().as_chunks::<RANGE>() else { return Err(Errno::INVAL) };
        if ranges.is_empty() || u32::try_from(ranges.len()) != Ok(count) {
            return Err(Errno::INVAL);
        }
        Ok(Self::StartLog(LogRanges(ranges)))
    }
}

/// Returns the bytes of the bitmap of a report, unless it is more than a message may carry.
fn report_size(length: u64, page_size: u64) -> Option<u32> {
    let bytes = length.checked_div(page_size)?.div_ceil(64).checked_mul(8)?;
    u32::try_from(bytes).ok().filter(|&bytes| bytes <= MAX_DATA_XFER_SIZE)
}
