//! Contexts of processes, and protection domains.

use super::Driver;
use super::command::{CommandError, Request, command_id};

impl Driver {
    /// CREATE_UC, as when a process opens the device. Takes the lowest free UAR page.
    ///
    /// # Errors
    /// The command failed.
    pub fn open(&self) -> Result<Context, CommandError> {
        let uar = {
            let mut uars = self.0.uars.lock();
            let free = uars.iter().position(|used| !used).expect("all UAR pages are in use");
            uars[free] = true;
            free as u32
        };
        let pfn = (self.0.uar_base >> 12) + u64::from(uar);
        match self.execute(&Request::new(command_id::CREATE_UC).u64(16, pfn)) {
            Ok(response) => Ok(Context { driver: self.clone(), handle: response.u32(16), uar }),
            Err(error) => {
                self.0.uars.lock()[uar as usize] = false;
                Err(error)
            }
        }
    }

    /// CREATE_PD of a process, or of the kernel without context.
    ///
    /// # Errors
    /// The command failed.
    pub fn create_pd(&self, context: Option<&Context>) -> Result<Pd, CommandError> {
        let (context, uar) = context.map_or((0, 0), |context| (context.handle, context.uar));
        let response = self.execute(&Request::new(command_id::CREATE_PD).u32(16, context))?;
        Ok(Pd { driver: self.clone(), handle: response.u32(16), context, uar })
    }
}

/// Context of a process.
#[derive(Clone, Debug)]
pub struct Context {
    driver: Driver,
    /// Its handle.
    pub handle: u32,
    /// Its UAR page.
    pub uar: u32,
}

impl Context {
    /// DESTROY_UC.
    ///
    /// # Errors
    /// The command failed.
    pub fn close(self) -> Result<(), CommandError> {
        let result = self.driver.execute(&Request::new(command_id::DESTROY_UC).u32(16, self.handle));
        self.driver.0.uars.lock()[self.uar as usize] = false;
        result.map(drop)
    }
}

/// A protection domain.
#[derive(Clone, Debug)]
pub struct Pd {
    pub(super) driver: Driver,
    /// Its handle.
    pub handle: u32,
    /// Handle of the context that owns it, 0 for the kernel.
    pub context: u32,
    /// UAR page of its owner.
    pub uar: u32,
}

impl Pd {
    /// Returns `true` if it belongs to a process.
    pub const fn is_user(&self) -> bool {
        self.context != 0
    }

    /// DESTROY_PD.
    ///
    /// # Errors
    /// The command failed.
    pub fn destroy(self) -> Result<(), CommandError> {
        self.driver.execute(&Request::new(command_id::DESTROY_PD).u32(16, self.handle)).map(drop)
    }
}
