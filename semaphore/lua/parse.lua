-- The head of all scripts that read the field quiet of state, which apply.lua describes.

local struct = rawget(_G, 'struct') -- nil on stand-ins for Redis without this library, which never write the field

-- parse returns the numbers and names of the field, or nil if it is corrupt.
local function parse(text)
  if not struct then return end
  local at, all = 1, {processes = {}, holders = {}}
  local function numbers(count)
    local list = {}
    for i = 1, count do
      local n = at + 7 <= #text and struct.unpack('<d', text, at)
      if not (n and n >= 0 and n <= 9007199254740992 and n % 1 == 0) then return end
      list[i], at = n, at + 8
    end
    return list
  end
  local function named(list, prefix, names, count)
    if text:sub(at, at + #prefix - 1) ~= prefix then return end
    at = at + #prefix
    local item = {}
    for i = 1, names do
      local last = text:find('\0', at, true)
      if not last then return end
      item[i], at = text:sub(at, last - 1), last + 1
    end
    item.numbers = numbers(count)
    list[#list + 1] = item
    return item.numbers
  end
  all.head = numbers(8)
  if not all.head then return end
  while at <= #text do
    if not (named(all.processes, '\nprocess ', 1, 2) or named(all.holders, '\nholder ', 2, 4)) then return end
  end
  return all
end

