//! Commands. Each runs inside the register write that issues it: memory that the driver passes with it is copied before
//! the write returns, and all DMA has ended when QUIESCE or RESET returns.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use log::Level;
use pvrdma_guest_memory::DmaView;

use crate::abi::command::{Coalesce, Command, ConfigPlace};
use crate::abi::regs::DEVICE_ID;
use crate::abi::rss_conf::RssConf;
use crate::abi::shared::{COMMAND_INFO_AT, FEATURES_AT, FILTER_AT, FILTER_LEN, Features, FilterConfig, RSS_AT};
use crate::abi::{le32, le64};
use crate::core::{Core, pending};
use crate::error::CommandError;
use crate::session::{Session, Which, load_multicast, load_rss};

/// Size of a slot of the transmit data ring, in bytes. The device does not depend on it: a slot address is handled like
/// any other.
const TX_DATA_SLOT: u32 = 128;
/// Interrupt configuration: type automatic (0), mask mode automatic (0), which masks a vector when it is raised.
const INTERRUPTS_AUTO: u32 = 0;
/// Adaptive rings are not supported.
const NO_ADAPTIVE_RING: u32 = 1;
const LINK_UP: u32 = 1;

/// Registers that commands use as input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Registers {
    /// Revision chosen by the driver.
    pub(crate) revision: u8,
    /// Bus address of the shared area.
    pub(crate) shared: u64,
}

/// Executes a command and returns its result.
///
/// # Errors
/// The command is refused.
pub(crate) fn execute(core: &Core, registers: Registers, number: u32) -> Result<u32, CommandError> {
    if core.is_paused() {
        return Err(CommandError::Paused);
    }
    let command = Command::parse(number, registers.revision).ok_or(CommandError::Unknown(number))?;
    let [a, b, c, d, e, f] = core.config.mac.0;
    match command {
        Command::Activate => activate(core, registers)?,
        Command::Quiesce => end(core),
        Command::Reset => {
            end(core);
            core.interrupts.reset();
            core.counters.vmxnet3_resets.increment();
        }
        Command::UpdateRxMode
        | Command::UpdateMacFilters
        | Command::UpdateVlanFilters
        | Command::UpdateRss
        | Command::UpdateFeatures => update(core, command)?,
        // Batches already moderate interrupts, and wake on LAN is not implemented.
        Command::UpdateModeration | Command::UpdatePower => {}
        Command::SetCoalesce => set_coalesce(core, registers)?,
        Command::GetCoalesce => get_coalesce(core, registers)?,
        Command::GetQueueStatus => {
            with_session(core, |session, view| session.queues().for_each(|which| session.write_status(view, which)));
        }
        Command::GetStats => with_session(core, |session, view| write_stats(core, session, view)),
        Command::GetLink => {
            let up = core.link_up.load(Ordering::Acquire);
            return Ok(if up { u32::from(core.config.speed) << 16 | LINK_UP } else { 0 });
        }
        Command::GetPermanentMacLow => return Ok(u32::from_le_bytes([a, b, c, d])),
        Command::GetPermanentMacHigh => return Ok(u32::from_le_bytes([e, f, 0, 0])),
        Command::GetDeviceIdLow => return Ok(DEVICE_ID.into()),
        Command::GetDeviceIdHigh | Command::GetExtraInfo => {}
        Command::GetInterruptConfig => return Ok(INTERRUPTS_AUTO),
        Command::GetAdaptiveRingInfo => return Ok(NO_ADAPTIVE_RING),
        Command::GetTxDataSize => return Ok(TX_DATA_SLOT),
    }
    Ok(0)
}

/// Starts a session. An existing session ends first.
fn activate(core: &Core, registers: Registers) -> Result<(), CommandError> {
    end(core);
    if !core.is_bus_master() {
        return Err(CommandError::Masked);
    }
    let session = {
        let view = core.memory.view();
        let link_up = core.link_up.load(Ordering::Acquire);
        Session::new(&view, registers.shared, core.config.vectors, registers.revision, link_up)?
    };
    core.interrupts.set_auto_mask(session.auto_mask);
    core.set_session(Some(Arc::new(session)));
    // The driver may have filled its transmit rings before ACTIVATE.
    core.pending.fetch_or(pending::TX, Ordering::AcqRel);
    core.counters.vmxnet3_activations.increment();
    // The limited log is used, because a guest can repeat this command in a loop.
    core.log.log(
        module_path!(),
        Level::Info,
        &core.config.name,
        format_args!("active, revision {}", registers.revision),
    );
    Ok(())
}

/// Ends all DMA.
pub(crate) fn end(core: &Core) {
    core.set_session(None);
    core.interrupts.clear();
}

fn with_session(core: &Core, run: impl FnOnce(&Session, &DmaView<'_>)) {
    let session = core.session().clone();
    if let Some(session) = session {
        core.during(&session, |view| run(&session, view));
    }
}

/// Copies part of the shared area.
fn load<const N: usize>(view: &DmaView<'_>, shared: u64, at: u64) -> Result<[u8; N], CommandError> {
    let mut bytes = [0; N];
    let address = shared.checked_add(at).ok_or(CommandError::NoShared(shared))?;
    view.read(address, &mut bytes).map_err(|error| CommandError::Memory("shared area", error))?;
    Ok(bytes)
}

/// Settings that the driver has changed.
enum Update {
    Features(Features),
    Rss(Option<RssConf>),
    RxMode(FilterConfig),
    Multicast(Vec<u8>),
    Vlans(FilterConfig),
}

/// Applies settings that the driver has changed. Without a session there is nothing to do: ACTIVATE reads all settings.
fn update(core: &Core, command: Command) -> Result<(), CommandError> {
    let session = core.session().clone();
    let Some(session) = session else { return Ok(()) };
    // The view is released before the settings are locked: delivery takes the two locks in the opposite order.
    let Some(update) = core.during(&session, |view| load_update(&session, view, command)) else { return Ok(()) };
    let update = update?;
    let mut settings = session.settings.write();
    match update {
        Update::Features(features) => settings.features = features,
        Update::Rss(rss) => settings.rss = rss,
        Update::RxMode(filter) => settings.filter.set_mode(filter.mode),
        Update::Multicast(table) => settings.filter.set_multicast(&table),
        Update::Vlans(filter) => settings.filter.set_vlans(filter.vlans),
    }
    Ok(())
}

/// Copies the changed settings, including all memory that the driver may free after the command.
fn load_update(session: &Session, view: &DmaView<'_>, command: Command) -> Result<Update, CommandError> {
    let shared = session.shared();
    let filter = || load::<FILTER_LEN>(view, shared, FILTER_AT).map(|bytes| FilterConfig::parse(&bytes));
    Ok(match command {
        Command::UpdateFeatures => Update::Features(Features::parse(le64(&load::<8>(view, shared, FEATURES_AT)?, 0))),
        Command::UpdateRss => {
            let place = ConfigPlace::parse(&load::<16>(view, shared, RSS_AT)?);
            Update::Rss(load_rss(view, place, session.rx_count())?)
        }
        Command::UpdateRxMode => Update::RxMode(filter()?),
        Command::UpdateVlanFilters => Update::Vlans(filter()?),
        _ => Update::Multicast(load_multicast(view, &filter()?)?),
    })
}

/// Returns the bus address of the coalescing scheme.
fn coalesce_place(view: &DmaView<'_>, shared: u64) -> Result<u64, CommandError> {
    let place = ConfigPlace::parse(&load::<16>(view, shared, COMMAND_INFO_AT)?);
    if u64::from(place.len) < Coalesce::LEN as u64 {
        return Err(CommandError::Invalid("length of a coalescing scheme", place.len.into()));
    }
    Ok(place.address)
}

fn set_coalesce(core: &Core, registers: Registers) -> Result<(), CommandError> {
    let coalesce = {
        let view = core.memory.view();
        let address = coalesce_place(&view, registers.shared)?;
        let bytes = load::<{ Coalesce::LEN }>(&view, address, 0)?;
        Coalesce::parse(&bytes).ok_or_else(|| CommandError::Invalid("coalescing scheme", le32(&bytes, 0).into()))?
    };
    core.set_coalesce(coalesce);
    Ok(())
}

fn get_coalesce(core: &Core, registers: Registers) -> Result<(), CommandError> {
    let coalesce = *core.coalesce.lock();
    let view = core.memory.view();
    let address = coalesce_place(&view, registers.shared)?;
    view.write(address, &coalesce.encode()).map_err(|error| CommandError::Memory("coalescing scheme", error))
}

fn write_stats(core: &Core, session: &Session, view: &DmaView<'_>) {
    for which in session.queues() {
        let stats = match which {
            Which::Tx(index) => core.tx_stats.get(index).map(|stats| stats.encode()),
            Which::Rx(index) => core.rx_stats.get(index).map(|stats| stats.encode()),
        };
        if let Some(stats) = stats {
            session.write_stats(view, which, &stats);
        }
    }
}
