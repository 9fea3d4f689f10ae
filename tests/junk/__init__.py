"""Every public call with arguments that cannot be, beside rooms that must end well."""
