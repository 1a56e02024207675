package faultlab

import (
	"context"
	"strconv"

	"github.com/go-tokenbucket/tokenbucket"
)

type tenantKey struct{}

// as returns the context of a caller's calls: of a tenant, if the job has any. The callers belong to the tenants in turn.
func (j *Job) as(ctx context.Context, caller int) context.Context {
	if len(j.Tenants) == 0 {
		return ctx
	}
	return context.WithValue(ctx, tenantKey{}, caller%len(j.Tenants))
}

// tenantOf returns the tenant of a caller by its context; 0 if the job has none.
func tenantOf(ctx context.Context) int {
	tenant, _ := ctx.Value(tenantKey{}).(int)
	return tenant
}

// fair returns the options of a job with tenants.
func (j *Job) fair() []tokenbucket.Option {
	if len(j.Tenants) == 0 {
		return nil
	}
	return []tokenbucket.Option{
		tokenbucket.WithFairness(func(ctx context.Context) string { return strconv.Itoa(tenantOf(ctx)) }),
		tokenbucket.WithTenantWeights(func(tenant string) int {
			i, _ := strconv.Atoi(tenant)
			return j.Tenants[i]
		}),
	}
}
