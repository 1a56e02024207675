package console

// Editor changes limits.
type Editor interface{}

// editable tells whether anything can be changed, by whoever may.
func (c *Console) editable() bool { return c.config.Editor != nil }
